"""The report: one HTML page of everything that is known of a plan, which needs nothing beside it."""
