"""Chats as text: lists of messages through the tokenizer's chat template."""

from typing import Any

from mxd.common.errors import MxdError, first_line

DATE = "01 Jan 2025"
"""The day that templates are told where they ask for today's: else the same chat would be another text tomorrow."""
_CLOCK = "{% macro strftime_now(form) %}" + DATE + "{% endmacro %}"


def chat_text(where: str, messages: Any, tokenizer: Any) -> str:
    """Return a chat as the text that the model was trained to read, without the BOS and EOS around it.

    Contexts have their own BOS, and EOS follows every document. Role markers inside of the text become the tokens that
    the tokenizer has for them.

    Args:
        where: the row, for messages.
        messages: a list of ``{"role": ..., "content": ...}``, both text; other fields are the template's.
        tokenizer: the model's, ``None`` if there is none.

    Raises:
        MxdError: this is no such list, the tokenizer has no chat template, or the template refuses the chat.
    """
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        got = repr(messages)
        raise MxdError(
            f"{where}: expected a text or a chat, a list of {{'role': ..., 'content': ...}} with texts; got "
            f"{got if len(got) <= 200 else got[:200] + ' ...'}."
        )
    if getattr(tokenizer, "chat_template", None) is None:
        raise MxdError(
            f"{where}: a chat needs the tokenizer's chat template, and the base model's has none; choose an instruct "
            "model, set tokenizer.chat_template in Python, or give a column of plain text (data.column)."
        )
    try:
        template = _CLOCK + tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, date_string=DATE)
    except Exception as error:  # a template is a program that came with the model
        raise MxdError(f"{where}: the tokenizer's chat template refuses this chat: {first_line(error)}") from error
    return str(text).removeprefix(tokenizer.bos_token or "").removesuffix(tokenizer.eos_token or "")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
