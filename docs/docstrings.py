"""Extension of mkdocstrings: the docstrings' section "Example:" is shown as code, as griffe does for "Examples:"."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before the docstring is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
