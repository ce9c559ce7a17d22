"""What may be shown of an address."""

import re


def hide(url: str) -> str:
    """An address without its password."""
    return re.sub(r"(//[^:@/]*):[^@/]*@", r"\1:***@", url)
