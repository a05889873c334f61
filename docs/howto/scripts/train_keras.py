"""Train a sketched Keras model on two devices of TensorFlow.

The losses are compared with those on one device.
"""

import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from panther.integrations.keras import SKDense

# Two devices on one CPU. With GPUs, MirroredStrategy() takes them all.
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 2
)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

# 28 batches of 64: the devices get equal shares of each.
images, labels = load_digits(return_X_y=True)
x = images[:1792].astype("float32") / 16
y = labels[:1792].astype("int32")


def train() -> list[float]:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((64,)),
            SKDense(256, 1, 16, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model.fit(
        x, y, batch_size=64, epochs=5, shuffle=False, verbose=0
    ).history["loss"]


with strategy.scope():
    losses = train()
np.testing.assert_allclose(losses, train(), rtol=1e-4)
print(
    f"{strategy.num_replicas_in_sync} devices, losses {losses[0]:.3f} "
    f"to {losses[-1]:.3f}: those of one device"
)
