"""Numbers in texts for people: counts with the right plural, values that read 0.0000 only where they are zero."""

import math

NOISE = 1e-9
"""Below it a number is what sums in float32 leave of zero."""


def plural(number: float, one: str, many: str = "") -> str:
    """Return a number of things.

    Args:
        number: how many; whole.
        one: what one of them is called.
        many: what several are called; by default the same with an s.

    >>> plural(1, "splice"), plural(1200, "splice"), plural(0, "class", "classes")
    ('1 splice', '1,200 splices', '0 classes')
    """
    return f"{number:,.0f} {one if number == 1 else many or one + 's'}"


def shown(form: str, value: float) -> str:
    """Return a value as text; where its format would leave nothing but zeros of it, with two significant digits.

    What is below ``NOISE`` counts as zero.

    >>> shown("{:.4f}", 0.0132), shown("{:+.4f}", 0.0000321), shown("{:.0%}", 0.004), shown("{:.4f}", 0.0)
    ('0.0132', '+3.2e-05', '0.4%', '0.0000')
    """
    text = form.format(value)
    if abs(value) < NOISE or not math.isfinite(value) or any(digit in text for digit in "123456789"):
        return text
    sign = "+" if "+" in form else ""
    return f"{100 * value:{sign}.2g}%" if "%" in form else f"{value:{sign}.2g}"
