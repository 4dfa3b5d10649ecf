"""Runs work through an engine that has vLLM's interface, alone in its process: a job on stdin, seconds on stdout."""
import importlib
import json
import sys
import time


def main(package: str) -> None:
    job = json.load(sys.stdin)
    engine = importlib.import_module(package)
    llm = engine.LLM(job["model"], **job["options"])

    def run(prompts: list[list[int]], output_lens: list[int]) -> float:
        params = [engine.SamplingParams(temperature=job["temperature"], max_tokens=new, ignore_eos=True)
                  for new in output_lens]
        inputs = [{"prompt_token_ids": ids} for ids in prompts] if package == "vllm" else prompts
        start = time.perf_counter()
        llm.generate(inputs, params, use_tqdm=False)
        return time.perf_counter() - start

    seconds = []
    for prompts, output_lens in job["works"]:
        # Of the same lengths, but no prompt that a prefix cache would know afterwards.
        run([ids[::-1] for ids in prompts], [min(new, job["warm_up_output"]) for new in output_lens])
        seconds.append(run(prompts, output_lens))
    print("\n" + json.dumps(seconds))       # the last line, whatever the engine has printed


if __name__ == "__main__":
    main(sys.argv[1])
