"""The intermediate representation: an FX graph whose inputs and outputs have roles.

Every placeholder has the attribute ``ROLE`` and the output node has ``ROLES``, one entry per returned value. A role
identifies a value (a parameter by name, its gradient, a tangent), so that no code depends on positions. The joint
graph and, after the split, the forward and backward graphs have the same representation. A placeholder whose value is
in host memory has ``ON_HOST``; other host values are derived (:mod:`shardgraph.passes.analysis.places`). All attributes
of nodes are in :mod:`shardgraph.ir.attributes`.

Until :mod:`shardgraph.runtime.bind` runs, a graph is the same text on every rank: groups are named by mesh axis and
what depends on the rank is written with the symbolic operations below. So a comparison of two strings checks that all
ranks issue the same collectives.
"""

# ruff: noqa: F401 - the names of this package

from shardgraph.ir import buckets, fused
from shardgraph.ir.collectives import (
    ALL_GATHER,
    ALL_GATHER_OUT,
    ALL_REDUCE,
    ALL_REDUCE_,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    WAIT,
    collectives,
    describe_collective,
    group_of,
    is_collective,
    is_copy,
    is_started,
    is_wait,
    send,
)
from shardgraph.ir.copies import DIRECTIONS, TO_DEVICE, TO_HOST, WAIT_COPY
from shardgraph.ir.generators import GENERATOR_STATE, SET_GENERATOR_STATE, drop_unused_states, random_choices
from shardgraph.ir.graph import (
    AttributeResult,
    AttributeSet,
    Condition,
    JointGraph,
    Origin,
    OutputAlias,
    RowNumber,
    Sameness,
    UnboundGraph,
    add_output,
    copy_graph,
    copy_node,
    outputs,
    placeholders,
    set_outputs,
)
from shardgraph.ir.host_draws import DRAWN_MASK, drawing_function
from shardgraph.ir.rank_operations import (
    chunk_bounds,
    first_only,
    first_row,
    from_later,
    local_chunk,
    local_part,
    pad_shard,
    take_part,
    trim_shard,
)
from shardgraph.ir.roles import (
    Accumulated,
    Buffer,
    Checked,
    Forwarded,
    Gathered,
    Gradient,
    Input,
    IntermediateBase,
    Mutation,
    Output,
    Parameter,
    Returned,
    Role,
    Saved,
    SquaredNorm,
    Tangent,
    Updater,
    of_backward,
)
from shardgraph.ir.shortened_rows import ShortenedRows
from shardgraph.ir.squared_norm import SQUARED_NORM
from shardgraph.ir.update import Updates, update
