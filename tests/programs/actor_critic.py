"""Actor and critic with a shared body, in a loop of one's own with a step after each episode."""

import keras
import numpy as np
from keras import layers, ops

import keras_freeze as kf

OBSERVATIONS, ACTIONS, STEPS, DISCOUNT = 4, 2, 40, 0.5
HUBER = keras.losses.Huber(reduction="sum")


class Valley:
    """A ball in a valley that one of two pushes keeps near the middle."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.position, self.speed = self.rng.normal(0, 1.0, 2)
        return self.observe()

    def observe(self):
        return np.array([self.position, self.speed, self.position**2, 1.0], "float32")

    def step(self, action):
        self.speed += (0.5 if action else -0.5) - 0.1 * self.position
        self.position += 0.3 * self.speed
        self.speed *= 0.7
        return self.observe(), float(np.exp(-(self.position**2)))


class Agent:
    """A network with two heads, the policy and the value, and its optimizer."""

    def __init__(self):
        inputs = keras.Input((OBSERVATIONS,))
        common = layers.Dense(128, activation="relu")(inputs)
        common = layers.Dense(128, activation="relu")(common)
        policy = layers.Dense(ACTIONS, activation="softmax")(common)
        self.network = keras.Model(inputs, [policy, layers.Dense(1)(common)])
        self.optimizer = None


def play(network, valley):
    """One episode: what was seen, and for each step the action and the normalized return."""
    observations, actions, rewards = [], [], []
    observation = valley.reset()
    for _ in range(STEPS):
        probabilities, _ = network(observation[None])
        probabilities = keras.ops.convert_to_numpy(probabilities)[0].astype("float64")
        action = valley.rng.choice(ACTIONS, p=probabilities / probabilities.sum())
        observations.append(observation)
        observation, reward = valley.step(action)
        actions.append(action)
        rewards.append(reward)
    returns, total = [], 0.0
    for reward in rewards[::-1]:
        total = reward + DISCOUNT * total
        returns.insert(0, total)
    returns = np.array(returns)
    returns = (returns - returns.mean()) / (returns.std() + 1e-8)
    targets = np.stack([actions, returns], axis=1).astype("float32")
    return np.array(observations), targets, sum(rewards) / STEPS


def actor_critic_loss(targets, outputs):
    """The policy gradient's loss with the critic as baseline, and the critic's own."""
    probabilities, values = outputs
    returns, values = targets[:, 1], values[:, 0]
    chosen = ops.one_hot(ops.cast(targets[:, 0], "int32"), ACTIONS)
    log_chosen = ops.log(ops.sum(chosen * probabilities, axis=1) + 1e-8)
    advantage = returns - ops.stop_gradient(values)
    return -ops.sum(log_chosen * advantage) + HUBER(returns, values)


def tensorflow_step(network, optimizer, observations, targets):
    import tensorflow as tf

    with tf.GradientTape() as tape:
        loss = actor_critic_loss(tf.constant(targets), network(observations, training=True))
    gradients = tape.gradient(loss, network.trainable_variables)
    optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
    return float(loss)


def torch_step(network, optimizer, observations, targets):
    import torch

    network.zero_grad()
    loss = actor_critic_loss(torch.from_numpy(targets), network(observations, training=True))
    loss.backward()
    weights = network.trainable_weights
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return float(loss.detach())


def make_model():
    return Agent()


def compile_model(agent):
    agent.optimizer = kf.FreezeOptimizer(keras.optimizers.Adam(0.01), freeze_rate=0.9)


def freeze_model(agent):
    x, y, _ = play(agent.network, Valley(seed=1))
    kf.freeze(agent.network, x, y, loss=actor_critic_loss, optimizer=agent.optimizer)


def train(agent, episodes=8):
    step = {"tensorflow": tensorflow_step, "torch": torch_step}[keras.backend.backend()]
    valley, running_reward, losses = Valley(seed=0), 0.0, []
    for _ in range(episodes):
        observations, targets, reward = play(agent.network, valley)
        losses.append(step(agent.network, agent.optimizer, observations, targets))
        running_reward = 0.05 * reward + 0.95 * running_reward
    return losses


def networks(agent):
    """Those whose weights are trained, with their optimizer."""
    return [(agent.network, agent.optimizer)]


def keep(agent):
    """What one keeps of the training, and an input for it."""
    return agent.network, play(agent.network, Valley(seed=2))[0]
