"""The products that a head adds up: x W^T of its own weight, and one for each matrix of an adapter on it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from zeropipe.engine.backward.linear import DeferredLinear


class Term(NamedTuple):
    """One product of a head."""

    x: Tensor
    parameter: nn.Parameter  # (vocabulary, inputs)


def refuse_head(head: nn.Module) -> str | None:
    """Why a head's logits cannot be computed in chunks; None if they can."""
    if head._forward_hooks:
        return "its head has forward hooks"
    inside = _saved_module(head)
    if inside is not head:
        return refuse_head(inside)
    if _is_lora(head):
        return _refuse_lora(head) or refuse_head(head.get_base_layer())
    if type(head).forward not in (nn.Linear.forward, DeferredLinear.forward) or "forward" in vars(head):
        return f"its head is a {type(head).__name__}"
    if "weight" not in head._parameters:
        return "the weight of its head is computed in each forward"
    return None


def _refuse_lora(head: Any) -> str | None:
    if head.merged or head.disable_adapters:
        return "the adapter on its head is merged or disabled"
    if any(head.use_dora.values()) or getattr(head, "lora_variant", None):
        return "the adapter on its head is not a plain LoRA"
    if any(layer.bias is not None for layer in head.lora_B.values()):
        return "the adapter on its head has a bias"
    if any(
        layer._forward_hooks or layer._forward_pre_hooks for layer in (head.get_base_layer(), *head.lora_B.values())
    ):
        return "the layers of the adapter on its head have hooks"
    return None


def head_terms(head: Any, x: Tensor) -> tuple[list[Term], Tensor | None]:
    """The terms of a head for its input x, and its bias. An adapter's smaller inputs are computed here, by autograd."""
    head = _saved_module(head)
    if not _is_lora(head):
        return [Term(x, head._parameters["weight"])], head._parameters["bias"]
    terms, bias = head_terms(head.get_base_layer(), x)
    for name in head.active_adapters:
        if name in head.lora_A:
            inner = head.lora_A[name]
            reduced = inner(head.lora_dropout[name](x.to(inner.weight.dtype))) * head.scaling[name]
            terms.append(Term(reduced, head.lora_B[name]._parameters["weight"]))
    return terms, bias


def own_layer(head: Any) -> nn.Module:
    """The linear layer inside the wrappers of adapters."""
    inside = _saved_module(head)
    return own_layer(inside.get_base_layer()) if _is_lora(inside) else inside


def _is_lora(head: Any) -> bool:
    # compared by name, so that peft need not be imported
    return (type(head).__module__, type(head).__name__) == ("peft.tuners.lora.layer", "Linear")


def _saved_module(head: Any) -> Any:
    """The module that is trained in place of the head, of an adapter's `modules_to_save`."""
    if not hasattr(head, "modules_to_save") or not hasattr(head, "original_module"):
        return head
    active = getattr(head, "active_adapters", None) or [head.active_adapter]
    name = next((name for name in active if name in head.modules_to_save), None)
    return head.original_module if name is None or head.disable_adapters else head.modules_to_save[name]
