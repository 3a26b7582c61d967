#!/usr/bin/env python3
"""Makes tests/golden/elasticity.json: what DeepSpeed's compute_elastic_config answers.

    tests/golden/make_elasticity.py DIR     DIR: the unpacked source of a DeepSpeed that has elasticity (0.16.4; 0.19 has none); needs numpy
                                      pip download --no-deps --no-binary :all: deepspeed==0.16.4

Only its elasticity is imported, without torch. Left out are cases whose least common multiple is beyond the largest batch: 0.16.4
takes it all the same, and DeepSpeed's main branch does not.
"""

import json
import logging
import math
import pathlib
import random
import sys
import types

OUT = pathlib.Path(__file__).resolve().parent / "elasticity.json"


def elasticity(source):
    package = types.ModuleType("deepspeed")
    package.__path__ = [str(source / "deepspeed")]
    version = types.ModuleType("deepspeed.git_version_info")
    version.version = "0.16.4"
    utils = types.ModuleType("deepspeed.utils")
    utils.logger = logging.getLogger("silent")
    inner = types.ModuleType("deepspeed.elasticity")
    inner.__path__ = [str(source / "deepspeed" / "elasticity")]
    sys.modules.update({m.__name__: m for m in (package, version, utils, inner)})
    from deepspeed.elasticity import elasticity as module

    return module


def cases():
    yield {"max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32, "max_gpus": 1500}
    yield {"max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6]}
    yield {"max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "max_gpus": 4}
    yield {"max_train_batch_size": 1, "micro_batch_sizes": [1]}
    yield {"max_train_batch_size": 720720 * 3, "micro_batch_sizes": [1, 2], "max_gpus": 64}
    draw = random.Random(7)
    for _ in range(120):
        micro = sorted({draw.randint(1, 24) for _ in range(draw.randint(1, 4))}, key=lambda _: draw.random())
        case = {"max_train_batch_size": draw.choice([64, 100, 512, 2000, 10000]), "micro_batch_sizes": micro}
        if draw.random() < 0.5:
            case["min_gpus"] = draw.randint(1, 16)
            case["max_gpus"] = case["min_gpus"] + draw.randint(0, 200)
        if draw.random() < 0.5:
            case["prefer_larger_batch"] = draw.random() < 0.5
        yield case


def main():
    module = elasticity(pathlib.Path(sys.argv[1]))
    answers = []
    for case in cases():
        if math.lcm(*case["micro_batch_sizes"]) > case["max_train_batch_size"]:
            continue
        config = {"elasticity": {"enabled": True, "version": 0.1, **case}}
        try:
            batch, ranks, *_ = module.compute_elastic_config(config, "0.16.4")
        except Exception as error:
            answers.append({"config": case, "refused": type(error).__name__})
            continue
        if not ranks:  # 0.16.4 answers None or [], and refuses whatever starts
            answers.append({"config": case, "refused": "no ranks"})
            continue
        batch, ranks = int(batch), [int(count) for count in ranks]
        some = sorted({ranks[0], ranks[len(ranks) // 2], ranks[-1]})
        micro = [[world, int(module.compute_elastic_config(config, "0.16.4", world_size=world)[2])] for world in some]
        answers.append({"config": case, "batch": batch, "ranks": len(ranks), "sum": sum(ranks), "first": ranks[:20], "micro": micro})
    lines = ",\n".join(json.dumps(answer) for answer in answers)
    OUT.write_text('{"made_with": "deepspeed 0.16.4", "cases": [\n' + lines + "\n]}\n")
    print(len(answers), "cases", sum("refused" in answer for answer in answers), "refused")


if __name__ == "__main__":
    main()
