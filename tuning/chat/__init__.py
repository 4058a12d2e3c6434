"""Conversations as text: chat templates, tool calls in each family's form, and JSON schemas of tools."""

from collections.abc import Mapping
from typing import Any

Message = Mapping[str, Any]
"""A message of a conversation: `role` and `content`, of an assistant also `tool_calls`."""
