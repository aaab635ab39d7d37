"""What the layers of heads are made of, for the operations that run them."""

from torch import Tensor

from foredraft.heads.nets.blocks import Attend
from foredraft.heads.nets.eagle import Eagle, Eagle3, EagleNet
from foredraft.heads.nets.hydra import PrefixLayer
from foredraft.model.linear.packed import any_weight
from foredraft.model.ops import HeadNet


def described(net: EagleNet) -> HeadNet:
    """The layers of an EAGLE head."""
    if isinstance(net, Eagle):
        own = {
            "config": net.config.block,
            "blocks": tuple(net.layers),
            "entry": "fused",
            "entry_layers": {"fusion": net.fc},
            "taps": net.taps,
        }
    else:
        assert isinstance(net, Eagle3)
        first, linear = net.midlayer, net.fuses_linearly
        own = {
            "config": net.config.block,
            "blocks": (first, *net.layers),
            "entry": "beside",
            "entry_layers": {"token_norm": first.input_layernorm, "state_norm": first.hidden_norm},
            "normed_residual": net.config.norm_before_residual,
            "norm": net.norm,
            "embedding": net.embed_tokens,
            "output": net.lm_head,
            "carries_norm": net.config.norm_carried,
            "taps": net.taps if linear else (),
            "fusion": net.fc if linear else None,
        }
    vocabulary = None if net.vocabulary is None else net.vocabulary.contiguous()
    return HeadNet(
        read=net,
        device=any_weight(net).device,
        reserve=net.rotary.reserve,
        rotary=net.rotary,
        window=net.window,
        drafts=True,
        vocabulary=vocabulary,
        **own,
    )


def described_prefix(net: PrefixLayer) -> HeadNet:
    """Hydra++'s prefix layer, which reads the target's states but not the tokens."""

    def read(tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        return net(features, positions, attend)

    return HeadNet(
        read=read,
        device=any_weight(net).device,
        config=net.config,
        blocks=(net.layer,),
        rotary=net.rotary,
        entry="states",
        norm=net.norm,
        normed=True,
        window=net.window,
    )
