"""The straightforward forms that the package's own are measured against: dense matching, decoding without a cache.

Letters: B pairs, T text positions, L positions of a caption, N visual tokens of one image, D width.
"""

import torch
from torch import Tensor

from diffcap.methods.clip4idc.model import CLIP4IDC
from diffcap.methods.dirl import DIRL
from diffcap.methods.pcl.model import MASK, PCL
from diffcap.methods.scorer.model import SCORER
from diffcap.models.captioner import Captioner
from diffcap.models.cross_image import CrossImageOutput
from diffcap.models.decoder import NULL, UNK, pair_groups
from diffcap.models.layers import KeyValue


def dense_matching(query: Tensor, key: Tensor, block: int = 0) -> Tensor:
    """Token-wise matching (SCORER, eq. 2 and 3) as the equations read: (A, N, D) and (B, M, D) to (A, B); `block` has no effect."""
    similarity = torch.einsum("and,bmd->abnm", query, key)
    return (similarity.max(3).values.mean(2) + similarity.max(2).values.mean(2)) / 2


class EveryLayerSCORER(SCORER):
    """SCORER that matches in every encoder layer, and keeps the last layer's scores, as the released code does."""

    def run_encoder(self, before: Tensor, after: Tensor) -> CrossImageOutput | None:
        """See `SCORER.run_encoder`; the scores of the layers before the last are made and forgotten."""
        encoded, groups = None, pair_groups(before, after)
        for layer in self.encoder:
            if encoded is not None:
                for rows in groups:
                    self.cross_view_similarities(*(part[rows] for part in self.merge_query_keys(encoded)))
            encoded = layer(before, after) if encoded is None else layer(encoded.before, encoded.after)
        return encoded


class TokensCLIP4IDC(CLIP4IDC):
    """CLIP4IDC that may be given a pair's tokens in place of pixels, to decode without the time of its image tower."""

    def encode(self, before: Tensor, after: Tensor) -> list[KeyValue]:
        """See `Captioner.encode`; or the pair's tokens (B, 2 + 2 N, E), twice."""
        return self.project_memory(self.run_encoder(before if before.ndim == 3 else self.encode_pixels(before, after)))


@torch.no_grad()
def uncached(captioner: Captioner, before: Tensor, after: Tensor, length: int) -> Tensor:
    """Greedy words (B, L) without anything remembered from one position to the next, but for the images' features.

    SCORER and DIRL run the decoder over the whole padded buffer at every position, the others over the words so far.
    """
    if isinstance(captioner, CLIP4IDC):
        return _clip4idc_words(captioner, before, after, length)
    if isinstance(captioner, PCL):
        return _pcl_words(captioner, before, after, length)
    assert isinstance(captioner, SCORER | DIRL)
    before, after = captioner.embedding(before), captioner.embedding(after)
    visual = captioner.fuse(before, after, captioner.run_encoder(before, after))  # (B, N, D)
    tokens = torch.full((len(after), length), NULL)
    tokens[:, 0] = captioner.bos_id
    for position in range(length - 1):
        hidden = captioner.decoder(tokens, captioner.decoder.project_memory(visual)).last_block.hidden
        logits = captioner.decoder.compute_logits(hidden[:, position])
        logits[:, UNK] = float("-inf")
        tokens[:, position + 1] = logits.argmax(1)
    return tokens


def _clip4idc_words(captioner: CLIP4IDC, before: Tensor, after: Tensor, length: int) -> Tensor:
    visual = before if before.ndim == 3 else captioner.encode_pixels(before, after)
    tokens = torch.full((len(after), 1), captioner.bos_id)
    for _ in range(length - 1):
        hidden = captioner.decode(tokens, captioner.project_memory(captioner.run_encoder(visual))).last_block.hidden
        tokens = torch.cat([tokens, captioner.compute_logits(hidden[:, -1]).argmax(1, keepdim=True)], 1)
    return tokens


def _pcl_words(captioner: PCL, before: Tensor, after: Tensor, length: int) -> Tensor:
    trunk = captioner.trunk
    visual = trunk.encode_images(before, after)[1]  # (B, M, D)
    seen = visual.shape[1]
    tokens = torch.full((len(after), 1), captioner.bos_id)
    hidden_word = torch.full_like(tokens, MASK)
    for _ in range(length - 1):
        text = trunk.embed_text(torch.cat([tokens, hidden_word], 1))
        mask = torch.ones(seen + text.shape[1], seen + text.shape[1], dtype=torch.bool).tril()
        mask[:seen, :seen] = True  # visual tokens see each other and no word
        hidden, _ = trunk.cross_encoder(torch.cat([visual, text], 1), mask)
        tokens = torch.cat([tokens, trunk.output_layer(hidden[:, -1]).argmax(1, keepdim=True)], 1)
    return tokens
