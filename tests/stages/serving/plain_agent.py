"""Programs of episodes without a client library, so that they start at once; the task says how one behaves."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

TASK = json.loads(os.environ["RLHF_TASK"])
SESSION = os.environ["RLHF_SESSION"]


def post(path, value, **more):
    body = json.dumps(value).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **more}
    request = urllib.request.Request(f"{SESSION}/{path}", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def say(*texts, **options):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    said = post("v1/chat/completions", {"model": "any", "messages": messages, "max_tokens": 4, **options})
    return said["choices"][0]["message"]["content"]


def two_turns():
    answer = say("one", temperature=0.1, seed=1)
    say("one", answer, "two")
    print(json.dumps({"reward": 0.25, "success": True}))


def outside():
    say("one")
    statuses = []
    for path, what in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("completions", {"prompt": "x"}),
    ):
        try:
            post(f"../../v1/{path}", {"model": "any", "max_tokens": 4, **what})
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    print(json.dumps({"reward": statuses.count(404)}))


def fork():
    answer = say("one")
    say("other")
    say("one", answer, "two")
    with open(int(os.environ["RLHF_GRADER_FD"])) as file:
        grader = json.load(file)
    post("reward", {"reward": 2, "success": grader["answer"] == "4"}, **{"x-rlhf-reward-key": grader["reward_key"]})
    print("no JSON")


def delete():
    say("one")
    with open(int(os.environ["RLHF_GRADER_FD"])) as file:
        key = {"x-rlhf-reward-key": json.load(file)["reward_key"]}
    post("reward", {"reward": 1}, **key)
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", **key}
    urllib.request.urlopen(urllib.request.Request(SESSION, headers=headers, method="DELETE"))


STEAL = """
import json, os, sys, urllib.error, urllib.request
statuses = []
for method, path in (("POST", "/reward"), ("DELETE", "")):
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    body = json.dumps({"reward": 1, "success": True}).encode()
    request = urllib.request.Request(os.environ["RLHF_SESSION"] + path, body, headers, method=method)
    try:
        statuses.append(urllib.request.urlopen(request).status)
    except urllib.error.HTTPError as error:
        statuses.append(error.code)
opened = []
for number in range(3, 64):
    try:
        opened.append(os.read(number, 4096).decode())
    except OSError:
        pass
json.dump({"environ": dict(os.environ), "statuses": statuses, "opened": opened}, open(sys.argv[1], "w"))
"""


def stolen():
    say("one")
    subprocess.run([sys.executable, "-c", STEAL, TASK["file"]], check=True)


def crash():
    say("one")
    sys.exit("it broke")


def hang():
    say("one")
    sleep_on()


def sleep_on():
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    with open(TASK["pids"], "a") as file:
        file.write("".join(f"{child.pid}\n" for child in children))
    time.sleep(600)


def ignore():
    try:
        say("one")
    except (OSError, urllib.error.URLError):
        sleep_on()


def large():
    say("one")
    print(json.dumps({"reward": len(bytearray(TASK["megabytes"] * 2**20))}))


def silent():
    print('{"reward": 1}')


def wrong():
    say("one")
    print('{"reward": "much"}')


def many():
    for number in range(10):
        say(str(number))


def long():
    try:
        say("x" * 500)
    except urllib.error.HTTPError as error:
        print(json.dumps({"reward": -1.0, "code": json.load(error)["error"]["code"]}))
    say("x")


globals()[TASK["do"]]()
