#!/usr/bin/env python3
"""What `penstock serve` makes of the tokens a second of `penstock.LLM`, and what its process grows by.

    bench/serve.py DIR [--clients 32] [--tokens 32] [--rounds 5] [--host-memory 1GiB] [--requests 0]

For a Python that has penstock[serve]. DIR is a model's directory; LLM and the server keep it at once, each within --host-memory. In turns: one call
of LLM.generate makes --tokens tokens behind 16 for each of --clients prompts; then as many clients ask the server for the same at once, each on a
connection of its own. Both choose greedily, and their texts must be the same. Prints a line for each round and the medians. Then
--requests requests go to the server, --clients at a time, a third of whose clients leave before the answer, and the process is measured before and after. On an idle
machine: clients, server and LLM share the processors.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import json
import re
import signal
import statistics
import subprocess
import sys
import time

import penstock

PROMPT = 16
TOKENS_OF_VOCABULARY = 200


class Server:
    def __init__(self, given):
        program = "import sys; from penstock._programs import penstock; sys.argv[0] = 'penstock'; penstock()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, "serve", given.model, "--port", "0", "--host-memory", given.host_memory, "--batch", str(given.clients)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        line = self.process.stdout.readline()
        found = re.search(r"http://127.0.0.1:(\d+)/v1", line)
        if found is None:
            raise SystemExit(f"bench/serve.py: the server did not start: {line}")
        self.port = int(found[1])
        status, models = self.ask("GET", "/v1/models")
        assert status == 200, models
        self.model = json.loads(models)["data"][0]["id"]

    def ask(self, method, path, body=None, patience=600):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience)) as connection:
            connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def complete(self, prompt, tokens, patience=600):
        status, answer = self.ask("POST", "/v1/completions", {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}, patience)
        if status != 200:
            raise SystemExit(f"bench/serve.py: {status}: {answer}")
        choice = json.loads(answer)
        return choice["choices"][0]["text"], choice["usage"]["completion_tokens"]

    def complete_or_leave(self, number, prompt, tokens):
        with contextlib.suppress(TimeoutError):
            self.complete(prompt, tokens, 0.05 if number % 3 == 0 else 600)

    def of_process(self):
        with open(f"/proc/{self.process.pid}/status") as file:
            status = dict(line.split(":", 1) for line in file)
        return {"threads": int(status["Threads"]), "resident_mib": int(status["VmRSS"].split()[0]) / 1024}

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=300)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--requests", type=int, default=0)
    given = parser.parse_args()
    prompts = [[1 + (i * 7 + j * 13) % TOKENS_OF_VOCABULARY for j in range(PROMPT)] for i in range(given.clients)]
    server = Server(given)
    try:
        with concurrent.futures.ThreadPoolExecutor(given.clients) as clients:
            rows = []
            with penstock.LLM(given.model, host_memory=given.host_memory, batch=given.clients) as llm:
                for round_ in range(given.rounds + 1):
                    begun = time.perf_counter()
                    texts = [(text.text, len(text.tokens)) for text in llm.generate(prompts, max_tokens=given.tokens, temperature=0)]
                    between = time.perf_counter()
                    served = list(clients.map(server.complete, prompts, [given.tokens] * given.clients))
                    ended = time.perf_counter()
                    assert served == texts, "the server's texts are others"
                    made = sum(count for _, count in texts)
                    row = {"llm_tokens_per_s": made / (between - begun), "served_tokens_per_s": made / (ended - between)}
                    row["served_over_llm"] = row["served_tokens_per_s"] / row["llm_tokens_per_s"]
                    if round_ > 0:  # the first one warms up
                        rows.append(row)
                        print("  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
            print("median:  " + "  ".join(f"{key} {statistics.median(row[key] for row in rows):.3f}" for key in rows[0]))
            if given.requests:
                before = server.of_process()
                numbers = range(given.requests)
                list(clients.map(lambda number: server.complete_or_leave(number, prompts[number % given.clients], 1 + number % 8), numbers))
                after = server.of_process()
                print(f"{given.requests} requests: " + "  ".join(f"{key} {before[key]:.1f} -> {after[key]:.1f}" for key in before))
    finally:
        status = server.stop()
    assert status == 0, status


if __name__ == "__main__":
    main()
