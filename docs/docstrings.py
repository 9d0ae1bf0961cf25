"""Extension of mkdocstrings for the form of diffcap's docstrings."""

import re
from typing import Any

import griffe


class Docstrings(griffe.Extension):
    """Change docstrings before griffe parses them."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute, when the package is loaded."""
        if obj.docstring is None:
            return
        text = re.sub(
            r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE
        )  # griffe's name of the section
        text = re.sub(r"(`[^`\n]*`)|<(\w+)>", lambda match: match[1] or f"&lt;{match[2]}&gt;", text)
        names = "|".join(sorted(map(re.escape, _arguments(obj)), key=len, reverse=True))
        if names:  # one line may describe several arguments; each gets a line of its own
            text = re.sub(rf"(?<=\.) ((?:{names})(?:, (?:{names}))*: )", r"\n    \1", text)
        obj.docstring.value = text


def _arguments(obj: griffe.Object) -> list[str]:
    """Names that the section of arguments or attributes of an object can have."""
    if isinstance(obj, griffe.Function):
        return [parameter.name for parameter in obj.parameters]
    if isinstance(obj, griffe.Class):
        init = obj.members.get("__init__")
        arguments = [parameter.name for parameter in init.parameters] if isinstance(init, griffe.Function) else []
        return [*arguments, *(name for name, member in obj.members.items() if member.is_attribute)]
    return []
