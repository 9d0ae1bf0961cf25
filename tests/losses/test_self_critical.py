"""The self-critical gradient equals a naive loop over captions and words, and the gradient of the expected reward."""

import itertools

import pytest
import torch

from diffcap.losses.self_critical import self_critical_loss

END, PAD = 1, 0


def test_loss_and_gradient_are_those_of_a_naive_loop() -> None:
    draws = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 4, 7, generator=draws, requires_grad=True)
    tokens = torch.randint(2, 7, (6, 5), generator=draws)
    tokens[0, 2], tokens[1, 1], tokens[2, 3] = END, END, PAD
    advantage = torch.randn(6, generator=draws)
    words = tokens[:, 1:].tolist()
    ends = [next((place + 1 for place, word in enumerate(row) if word in (END, PAD)), 4) for row in words]
    output = torch.arange(4) < torch.tensor(ends)[:, None]
    assert ends == [2, 1, 3, 4, 4, 4]
    losses = self_critical_loss(logits, tokens, output, advantage)
    expected = []
    for row in range(6):
        total = torch.zeros(())
        for place in range(4):
            word = int(tokens[row, place + 1])
            total = total + (logits[row, place, word] - logits[row, place].exp().sum().log())
            if word in (END, PAD):
                break
        expected.append(-advantage[row] * total)
    torch.testing.assert_close(losses, torch.stack(expected))
    ours, theirs = (torch.autograd.grad(loss.sum(), logits, retain_graph=True)[0] for loss in (losses, sum(expected)))
    torch.testing.assert_close(ours, theirs)
    assert ours.abs().sum() > 1


@pytest.mark.parametrize("baseline", [0.0, 0.7])
def test_its_mean_over_all_captions_is_the_gradient_of_the_expected_reward(baseline: float) -> None:
    words, length = 3, 2
    table = torch.randn(1 + words, words, generator=torch.Generator().manual_seed(1), requires_grad=True)
    captions = [torch.tensor([[2, *rest]]) for rest in itertools.product(range(words), repeat=length)]
    rewards = torch.rand(len(captions), generator=torch.Generator().manual_seed(2))

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return torch.stack([table[3], table[tokens[0, 1]]])[None]  # the second word depends on the first

    def chance(tokens: torch.Tensor) -> torch.Tensor:
        return logits(tokens).log_softmax(-1).gather(2, tokens[:, 1:, None]).sum().exp()

    expected = torch.autograd.grad(sum(chance(text) * reward for text, reward in zip(captions, rewards)), table)[0]
    output = torch.ones(1, length, dtype=torch.bool)
    losses = [
        chance(text).detach() * self_critical_loss(logits(text), text, output, (reward - baseline)[None])
        for text, reward in zip(captions, rewards)
    ]
    torch.testing.assert_close(-torch.autograd.grad(sum(losses).sum(), table)[0], expected)
