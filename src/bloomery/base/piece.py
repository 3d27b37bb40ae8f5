"""A piece: the box of a logical tensor that one rank holds.

The one description of how tensors lie on a machine. Initial weights, gradients, norms and checkpoints speak of pieces,
so none of them needs to know why a tensor was cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    tensor: Tensor
    """The very memory of the rank; its shape is the size of the box. A rank that holds nothing has an empty one."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Where the box begins in the whole."""
    owned: bool = True
    """Of all the ranks that hold this box, exactly one owns it: it alone writes it and counts it in a norm."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """A tensor that has not been cut."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.ndim)

    def with_tensor(self, tensor: Tensor) -> Piece:
        """The same box of another tensor: the gradient or a moment of a weight."""
        return Piece(tensor, self.shape, self.offset, self.owned)
