"""Trains a text predictor and predicts with it in a process that has torch. Takes EXAMPLES QUESTIONS MODEL, prints
JSON."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from predictor.text import TextPredictor, read_examples, train_text


def main(examples: Path, questions: Path, model: Path) -> None:
    report = train_text(read_examples(examples), model)
    predictor = TextPredictor.load(model)
    to_predict = read_examples(questions)
    predictions = predictor.predict_all(to_predict)
    started = time.perf_counter()
    for question in to_predict[:50]:
        predictor.predict(question)
    one_s = (time.perf_counter() - started) / 50
    single = predictor.predict(to_predict[0])
    try:
        TextPredictor.load(examples)
        refusal = ""
    except ValueError as error:
        refusal = str(error)
    pairs = [(one.total_tokens, one.p90_tokens) for one in predictions]
    print(
        json.dumps(
            {
                "report": asdict(report),
                "predictions": pairs,
                "single": (single.total_tokens, single.p90_tokens),
                "one_s": one_s,
                "refusal": refusal,
            }
        )
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
