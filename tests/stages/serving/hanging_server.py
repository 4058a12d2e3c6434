"""A server, of policies or of agents, over an engine whose steps hang as on a device that answers no more.

    hanging_server agents | PORT [answers]

With `answers` the engine is well.
"""

import sys
import threading
import time

import httpx

from rlhf.stages.serving import programs, web
from rlhf.stages.serving.app import make_app
from rlhf.stages.serving.programs import endpoint
from rlhf.stages.serving.serve import serve
from rlhf.stages.serving.server import Server
from rlhf.tuning.models.huggingface import random_params
from rlhf.tuning.rollout.engine.engine import Engine
from rlhf.tuning.rollout.engine.live import Live
from tests.stages.serving.support import CONFIG, CONTEXT, LIMITS, STOPS, TOKENIZER

KEY = "k" * 32


class Hanging(Engine):
    """Takes requests, and computes nothing."""

    def step(self):
        time.sleep(3600)


def agents(server):
    """Ends the server of agents once two requests are under way."""
    with endpoint(server, KEY) as url:
        print(url, flush=True)
        while httpx.get(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"}).text.find("in_flight 2") < 0:
            time.sleep(0.05)
    server.live.close(1)
    print("closed", flush=True)


def main():
    well = "answers" in sys.argv
    if not well:
        web.CLOSING_SECONDS = programs.CANCEL_SECONDS = 1
    engine = (Engine if well else Hanging)(CONFIG, limits=LIMITS)
    engine.load(random_params(CONFIG, 3))
    live = Live(engine)
    server = Server(live, TOKENIZER, "tiny", STOPS, CONTEXT)
    if sys.argv[1] == "agents":
        agents(server)
    else:
        serve(make_app(server), live, "127.0.0.1", int(sys.argv[1]))
    print([t.name for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()], flush=True)


if __name__ == "__main__":
    main()
