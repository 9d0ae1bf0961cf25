"""Train the embedded `blocks` backbone on scenes rendered on the fly, and write the weights that the package ships."""

from pathlib import Path

from diffcap.errors import plain_errors

FOLDER = Path("runs/blocks/backbone")


def main() -> None:
    """Read the command line, train or go on with a killed run, measure, write the weights."""
    from diffcap.lit.cli import StageCLI  # first: it makes --help quick

    # isort: split
    from lightning.pytorch.callbacks import ModelCheckpoint

    from diffcap.features.blocks_backbone import SHIPPED
    from diffcap.lit.backbone import BackboneTraining, RenderedScenes, linear_probe, ship, standardise

    class BackboneCLI(StageCLI):
        """Adds where the weights go and how many scenes measure them."""

        def add_arguments_to_parser(self, parser):  # type: ignore[no-untyped-def]
            """Two options of the stage itself."""
            parser.add_argument("--output", type=str, default=str(SHIPPED), help="file of the weights, .safetensors")
            parser.add_argument("--probe_images", type=int, default=6000, help="held-out scenes of the linear probe")

    cli = BackboneCLI(
        BackboneTraining,
        RenderedScenes,
        trainer_defaults={
            "accelerator": "auto",
            "devices": 1,
            "logger": False,
            "default_root_dir": str(FOLDER),
            "reload_dataloaders_every_n_epochs": 1,
            "enable_model_summary": False,
            "callbacks": [ModelCheckpoint(filename="last", enable_version_counter=False)],
        },
    )
    steps, data = cli.model.steps, cli.datamodule
    last = Path(cli.trainer.default_root_dir) / "checkpoints" / "last.ckpt"
    cli.trainer.fit_loop.epoch_loop.max_steps = steps
    cli.trainer.fit(cli.model, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
    if cli.trainer.global_step < steps:
        return  # stopped by hand: run again to go on

    network = cli.model.network.cpu().eval().fused()
    standardise(network, min(2000, cli.config.probe_images), data.seed, data.jitter)
    scores = linear_probe(network, cli.config.probe_images, data.seed, data.jitter)
    provenance = {
        "command": (
            f"python stages/backbone.py --seed_everything={cli.config.seed_everything} --model.steps={steps} "
            f"--model.lr={cli.model.lr} --model.dense_weight={cli.model.dense_weight} --data.batch_size={data.batch_size} "
            f"--data.batches={data.batches} --data.seed={data.seed} --data.jitter={data.jitter}"
        ),
        "seed": f"{cli.config.seed_everything} (weights), {data.seed} (scenes)",
        "steps": f"{steps} of {data.batch_size} images",
        "held_out": {**scores, "images": cli.config.probe_images},
    }
    output = Path(cli.config.output)
    ship(network, output, provenance)
    print(f"{output}: {output.stat().st_size / 1e6:.2f} MB; linear probe on held-out scenes: {scores}")


if __name__ == "__main__":
    with plain_errors():
        main()
