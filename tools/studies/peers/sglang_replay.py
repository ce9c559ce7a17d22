"""SGLang's own HTTP server with a scheduler that returns recorded turns (bench_endpoint.py).

    python tools/studies/peers/sglang_replay.py FOLDER      # config.json, tokenizer, turns.json

HTTP, chat template, tokenizer and detokenizer are SGLang's. Only the process that would run the
model is replaced: it answers a prompt with n turns of the assistant by recorded turn n, at once.
Prints the port, keys and the ids of the processes whose CPU time counts, as JSON. Ends with stdin.
"""

import json
import os
import subprocess
import sys
import threading
import time
from array import array
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from rlcore.metrics.jsonl import write_atomic  # noqa: E402
from rlcore.rollout.transport import free_port  # noqa: E402

DETOKENIZER = "detokenizer.pid"
PACKAGES = ("jsonschema==4.26.0", "soundfile==0.13.1")


def replay(server_args: Any, port_args: Any, *args: Any, **_: Any) -> None:
    """Answer all requests, in place of `sglang.srt.managers.scheduler.run_scheduler_process`."""
    from sglang.srt.managers.io_struct import (
        BatchTokenIDOutput,
        BatchTokenizedGenerateReqInput,
        TokenizedGenerateReqInput,
        sock_recv,
    )
    from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels

    recorded = json.loads((Path(server_args.model_path) / "turns.json").read_text())
    opening = tuple(recorded["opening"])
    pipe = next(a for a in args if hasattr(a, "send"))
    channels = SchedulerIpcChannels.create(
        port_args=port_args,
        is_rank_zero=True,
        skip_tokenizer_init=False,
        metrics_enabled=False,
        enable_scripted_runtime=False,
    )
    pipe.send(
        {
            "status": "ready",
            "max_total_num_tokens": 1 << 20,
            "max_req_input_len": 1 << 20,
            "startup_time": 0.0,
        }
    )
    while True:
        got = sock_recv(channels.recv_from_tokenizer)
        batch = got.batch if isinstance(got, BatchTokenizedGenerateReqInput) else [got]
        for asked in batch:
            if not isinstance(asked, TokenizedGenerateReqInput):
                continue
            prompt = list(asked.input_ids)
            number = sum(pair == opening for pair in zip(prompt, prompt[1:], strict=False)) - 1
            ids = recorded["turns"][number]
            # As SGLang's scheduler, which decodes the last prompt tokens with the answer.
            seen = prompt[-5:]
            nothing: list[Any] = [[]]
            channels.send_to_detokenizer.send_output(
                BatchTokenIDOutput(
                    rids=[asked.rid],
                    http_worker_ipcs=[asked.http_worker_ipc],
                    finished_reasons=[{"type": "stop", "matched": ids[-1]}],
                    decoded_texts=[""],
                    decode_ids=[array("q", seen + ids)],
                    read_offsets=[len(seen)],
                    output_ids=[array("q", ids)],
                    skip_special_tokens=[asked.sampling_params.skip_special_tokens],
                    spaces_between_special_tokens=[True],
                    no_stop_trim=[False],
                    prompt_tokens=[len(prompt)],
                    reasoning_tokens=[0],
                    completion_tokens=[len(ids)],
                    cached_tokens=[0],
                    input_token_logprobs_val=nothing,
                    input_token_logprobs_idx=nothing,
                    output_token_logprobs_val=nothing,
                    output_token_logprobs_idx=nothing,
                    input_top_logprobs_val=nothing,
                    input_top_logprobs_idx=nothing,
                    output_top_logprobs_val=nothing,
                    output_top_logprobs_idx=nothing,
                    input_token_ids_logprobs_val=nothing,
                    input_token_ids_logprobs_idx=nothing,
                    output_token_ids_logprobs_val=nothing,
                    output_token_ids_logprobs_idx=nothing,
                    output_token_entropy_val=None,
                    output_token_sampling_mask=None,
                    output_hidden_states=None,
                    routed_experts=None,
                    indexer_topk=None,
                    placeholder_tokens_idx=None,
                    placeholder_tokens_val=None,
                    retraction_counts=[0],
                )
            )


def detokenize(server_args: Any, *args: Any, **more: Any) -> None:
    """Run SGLang's detokenizer in this process, and write down its id."""
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    write_atomic(Path(server_args.model_path) / DETOKENIZER, str(os.getpid()))
    run_detokenizer_process(server_args, *args, **more)


def further_packages() -> Path:
    """Return the folder of packages that SGLang's server needs and its engine does not. Install
    them on the first call."""
    folder = ROOT / ".venvs/sglang-server"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        subprocess.run([*command, *PACKAGES], check=True)
    return folder


def end_with_stdin(children: list[Any]) -> None:
    """End this server and its processes when stdin ends."""
    sys.stdin.read()
    for child in children:
        child.kill()
    os._exit(0)


def main() -> None:
    folder = Path(sys.argv[1])
    stand_ins = str(ROOT / "rlcore/rollout/sglang_engine/cpu")  # of SGLang's kernels
    paths = [stand_ins, str(further_packages())]
    sys.path[:0] = paths
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    import psutil
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    port = free_port()
    arguments = ServerArgs(
        model_path=str(folder),
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        port=port,
        tool_call_parser="qwen25",
        skip_server_warmup=True,
        log_level="error",
        disable_overlap_schedule=True,
    )

    def ready() -> None:
        keys = ["none"] * 2 * json.loads((folder / "turns.json").read_text())["episodes"]
        while not (folder / DETOKENIZER).exists():  # its process imports SGLang at first
            time.sleep(0.1)
        pids = [os.getpid(), int((folder / DETOKENIZER).read_text())]
        print(json.dumps([port, keys, pids]), flush=True)
        children = psutil.Process().children()
        threading.Thread(target=end_with_stdin, args=(children,), daemon=True).start()

    launch_server(
        arguments,
        run_scheduler_process_func=replay,
        run_detokenizer_process_func=detokenize,
        launch_callback=ready,
    )


if __name__ == "__main__":
    main()
