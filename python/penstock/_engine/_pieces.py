"""What of a model is computed in chunks of tokens: its head with the loss, and the modules that the caller names."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

from torch import nn

from ._chunked_modules import ChunkedModules
from ._heads import Heads
from ._settings import Settings


class Pieces:
    """The forwards of these modules, from the first forward until the engine is closed."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        """ValueError: ``chunked_modules`` names what is not there."""
        self.heads = Heads(model, settings)
        self.modules = ChunkedModules(model, settings)

    def install(self) -> None:
        self.modules.install()
        self.heads.install()

    def remove(self) -> None:
        self.heads.remove()
        self.modules.remove()

    @property
    def replaced(self) -> List[Tuple[nn.Module, Optional[Callable[..., Any]]]]:
        """Modules whose forward is another, and the forward of their own instance before."""
        return [*self.heads.replaced, *self.modules.replaced]

    def report(self) -> Dict[str, Any]:
        """What a report says of them."""
        return {"logits_chunk_tokens": self.heads.tokens, "whole_logits_bytes": self.heads.whole_bytes}

    def notes(self) -> List[str]:
        """What a plan says of them, once a forward was followed."""
        heads = self.heads
        if not heads.tokens:
            return []
        return [
            f"logits: in chunks of {heads.tokens} tokens with their loss; whole ones would take {heads.whole_bytes} bytes in fp32, several times in a loss "
            "(logits_chunk_size)"
        ]
