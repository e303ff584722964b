"""SGLang's scheduler on the virtual GPU."""

from .adapter import ADAPTER as ADAPTER
