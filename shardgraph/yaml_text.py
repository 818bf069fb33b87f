"""YAML as files of plans and clusters are: a key is given once, and nothing is nested without end."""

from __future__ import annotations

from typing import Any

import yaml

_DEEPEST = 40  # a plan among the candidates of a plan is nested 10 deep


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > _DEEPEST:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, f"it is nested more than {_DEEPEST} deep", mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        if isinstance(node, yaml.MappingNode):
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def parsed(text: str) -> Any:
    """What a text of YAML says, in Python's own types.

    Raises:
        ValueError: it is not YAML, has a key twice, or is nested too deep; in one line, with the place.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"{error.problem or error.context}{where}") from error
    except yaml.YAMLError as error:  # characters that no text has
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it has itself inside") from None
    except (ValueError, TypeError, OverflowError, AttributeError) as error:  # a date that there is not, and the like
        raise ValueError(" ".join(str(error).split())) from error
