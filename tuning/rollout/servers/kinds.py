"""The kinds of servers, by the names that settings give them."""

from rlhf.tuning.rollout.servers.native import Native
from rlhf.tuning.rollout.servers.sglang import SGLang
from rlhf.tuning.rollout.servers.vllm import VLLM

ServerKind = VLLM | SGLang
KINDS: dict[str, ServerKind] = {kind.name: kind for kind in (VLLM(), SGLang(), Native())}
