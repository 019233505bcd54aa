"""The names that LoRA adapters may have, as requests name them."""

from __future__ import annotations

from quire_server.model_dir.adapter_layout import is_adapter_name

__all__ = ["is_adapter_name"]
