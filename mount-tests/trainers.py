"""Real trainers, tiny and repeatable, each run in a process of its own as users run theirs.

`Trainers` forks them from one process that has imported the libraries: importing anew for each would take most of the time.
"""
import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent


class Trainers:
    """Starts functions of this module in new processes."""

    def __init__(self):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["trainers_preload"])
        # The server does not get our sys.path.
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before]))
        self.context.Process(target=nothing).start()
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)

    def start(self, function, *args):
        process = self.context.Process(target=function, args=args, daemon=True)
        process.start()
        return process

    def finish(self, *processes, ends=0, seconds=60):
        """Waits for processes, which must end so: 0, or minus a signal."""
        for process in processes:
            process.join(seconds)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [ends] * len(codes), codes

    def run(self, function, *args, ends=0):
        self.finish(self.start(function, *args), ends=ends)


def nothing():
    pass


def die():
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def await_version(branch, number, seconds=40):
    """What a real trainer's long steps are good for: the checkpoint before is committed when the next one comes."""
    end = time.monotonic() + seconds
    while not os.path.isdir(Path(branch) / f"{number:06}"):
        if time.monotonic() > end:
            raise AssertionError(f"no version {number} in {branch}")
        time.sleep(0.02)


def small_model(hidden=64):
    """Random weights, the same each time."""
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=256, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=1, intermediate_size=4 * hidden
    )
    return GPTNeoXForCausalLM(config)


# Hugging Face Trainer


def die_while_saving(step):
    """The process dies half way through optimizer.pt of this step's checkpoint."""
    import transformers.trainer

    save = torch.save

    def half(what, path, *args, **options):
        if f"checkpoint-{step}/optimizer.pt" not in str(path):
            return save(what, path, *args, **options)
        with open(path, "wb") as file:
            save(what, file, *args, **options)
            file.truncate(file.tell() // 2)
            file.flush()
            die()

    transformers.trainer.torch.save = half


def hugging_face(out, versions=None, resume=None, ends_after=None, dies_in=None, limit=2):
    """Trains 8 steps with a checkpoint every second one, or goes on where it was. With `versions` each checkpoint has
    become one before training goes on."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

    def tokens(count, seed):
        rows = torch.randint(0, 256, (count, 16), generator=torch.Generator().manual_seed(seed))
        return [{"input_ids": row, "labels": row} for row in rows]

    class Pace(TrainerCallback):
        def on_save(self, args, state, control, **others):
            if versions:
                await_version(versions, state.global_step // 2)
            if state.global_step == ends_after:
                os._exit(0)

    if dies_in:
        die_while_saving(dies_in)
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(out),
        max_steps=8,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        save_total_limit=limit,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
    )
    trainer = Trainer(
        model=small_model(),
        args=arguments,
        train_dataset=tokens(64, 1),
        eval_dataset=tokens(8, 2),
        callbacks=[Pace()],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    trainer.model.save_pretrained(Path(out) / "final", max_shard_size="200KB")


# PyTorch Lightning


def lightning(out, versions, top_k, last, awaited):
    """Trains 4 epochs with a checkpoint each, of which the best `top_k` are kept. `awaited` are the numbers of versions to
    wait for after each."""
    import logging

    import pytorch_lightning as pl

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    pl.seed_everything(0, verbose=False)

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def training_step(self, batch, index):
            loss = (self.layer(batch[0]) - batch[0]).square().mean()
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Pace(pl.Callback):
        # After the checkpoints of an epoch, which are saved at its end.
        def on_train_epoch_start(self, trainer, module):
            if versions and trainer.current_epoch:
                await_version(versions, awaited[trainer.current_epoch - 1])

    keep = pl.callbacks.ModelCheckpoint(
        dirpath=str(out),
        filename="{epoch}",
        monitor="loss",
        save_top_k=top_k,
        save_last=last,
    )
    data = torch.utils.data.TensorDataset(torch.randn(64, 64))
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=False,
        callbacks=[keep, Pace()],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(out),
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(data, batch_size=16))


# accelerate


def accelerated(project, versions=None, load=None, limit=2):
    """Four states with automatic names, of which the last are kept; or loads one and says whether it is the last of them."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    torch.manual_seed(0)
    configuration = ProjectConfiguration(
        project_dir=str(project), automatic_checkpoint_naming=True, total_limit=limit
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if load:
        accelerator.load_state(str(load))
        assert optimizer.state_dict()["state"][0]["step"] == 4
        return
    for number in range(1, 5):
        accelerator.backward(model(torch.ones(4, 64)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state()
        if versions:
            await_version(versions, number)


# torch.distributed.checkpoint


def distributed(rank, ranks, meeting, work, *args):
    """Calls `work` as one of several ranks."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    work(rank, ranks, *args)
    dist.barrier()
    dist.destroy_process_group()


def sharded_state(step, ranks):
    """A tensor that is spread over the ranks and one that all have."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    full = torch.randn(4 * ranks, 4096, generator=torch.Generator().manual_seed(step))
    mesh = init_device_mesh("cpu", (ranks,))
    return {"model": {"spread": distribute_tensor(full, mesh, [Shard(0)]), "same": full[0].clone()}, "step": step}


def save_distributed(rank, ranks, branch, versions, steps, how):
    """Saves a state for each step, or dies on the way."""
    import torch.distributed.checkpoint as dcp

    if how == "between files" and rank == 0:

        def die_when_the_others_have_written(self, *args):
            while len(list(self.path.glob("*.distcp"))) < ranks - 1:
                time.sleep(0.01)
            time.sleep(0.2)
            die()

        dcp.FileSystemWriter.write_data = die_when_the_others_have_written
    elif how == "between files":
        written = dcp.FileSystemWriter.write_data

        def write_and_die(*args):
            written(*args)
            die()

        dcp.FileSystemWriter.write_data = write_and_die
    elif how == "before .metadata":
        # Rank 0 comes here when all have written.
        dcp.FileSystemWriter.finish = lambda *args, **options: die()
    for number, step in enumerate(steps, 1):
        state = sharded_state(step, ranks)
        path = Path(branch) / f"step-{step}"
        save = dcp.save if how != "async_save" else lambda *a, **o: dcp.async_save(*a, **o).result()
        try:
            save(state, checkpoint_id=path)
        except Exception:
            if how == "before .metadata":  # a rank that hears no more of rank 0
                die()
            raise
        if versions:
            await_version(versions, number)


def load_distributed(rank, ranks, paths, steps):
    import torch.distributed.checkpoint as dcp

    for path, step in zip(paths, steps):
        state = sharded_state(0, ranks)
        dcp.load(state, checkpoint_id=path)
        want = sharded_state(step, ranks)
        assert torch.equal(state["model"]["spread"].to_local(), want["model"]["spread"].to_local())
        assert torch.equal(state["model"]["same"], want["model"]["same"]) and state["step"] == step


# Files


def save_large(library, path, seed):
    """A file that takes a while."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    state = {f"layers.{i}.weight": torch.randn(1 << 20, generator=generator) for i in range(16)}
    (torch.save if library == "torch.save" else save_file)(state, path)
