"""The kinds of servers, by the names that settings give them."""

from tuning.rollout.servers.native import Native
from tuning.rollout.servers.protocol import ServerKind
from tuning.rollout.servers.sglang import SGLang
from tuning.rollout.servers.vllm import VLLM

KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), Native())}
