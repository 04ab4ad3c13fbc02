"""Continuations beside one another."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text


def terminal_diff(example: Mapping[str, Any]) -> Text:
    """Return a prompt with both continuations: what agrees from the first token on in green, the rest in red."""
    base, spliced = example["base_tokens"], example["spliced_tokens"]
    agreed = next((n for n, (a, b) in enumerate(zip(base, spliced, strict=True)) if a != b), len(base))
    text = Text(f"prompt   {example['prompt_text']}\n")
    text.append(f"base     {''.join(base)}\n")
    text.append("spliced  ")
    text.append("".join(spliced[:agreed]), style="green")
    text.append("".join(spliced[agreed:]), style="red")
    return text.append(f"\n         {agreed} of {len(base)} tokens agree\n")
