"""Trains a model each with scikit-learn, XGBoost and LightGBM, and writes them as ONNX files.

    python3 export.py FOLDER

The models tell three classes apart by thirteen numbers. FOLDER also gets expected.json: rows that
they were not trained on, and the probabilities that each library predicts for them.
"""

import json
import sys
from pathlib import Path

import numpy as np
from lightgbm import LGBMClassifier
from onnxmltools import convert_lightgbm, convert_xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from skl2onnx import to_onnx
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from xgboost import XGBClassifier

OPSET = 15  # of ONNX


def main(folder: Path) -> None:
    """Writes three models and expected.json."""
    x, y = make_classification(600, n_features=13, n_informative=6, n_classes=3, random_state=0)
    x = x.astype(np.float32)  # as a stage gets them
    train, rows, labels, _ = train_test_split(x, y, test_size=100, random_state=0)
    forest = make_pipeline(StandardScaler(), RandomForestClassifier(20, random_state=0)).fit(train, labels)
    boosted = XGBClassifier(n_estimators=20).fit(train, labels)
    light = LGBMClassifier(n_estimators=20, verbose=-1).fit(train, labels)

    # Axis 0, the rows, is None: dynamic. Without zipmap the probabilities are a tensor.
    types = [("X", FloatTensorType([None, x.shape[1]]))]
    models = {
        "sklearn": to_onnx(forest, train[:1], options={"zipmap": False}, target_opset=OPSET),
        "xgboost": convert_xgboost(boosted, initial_types=types, target_opset=OPSET),
        "lightgbm": convert_lightgbm(light, initial_types=types, zipmap=False, target_opset=OPSET),
    }
    for name, model in models.items():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
    answers = {"sklearn": forest, "xgboost": boosted, "lightgbm": light}
    expected = {name: model.predict_proba(rows).tolist() for name, model in answers.items()}
    (folder / "expected.json").write_text(json.dumps({"rows": rows.tolist(), "probabilities": expected}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
