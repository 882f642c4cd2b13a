"""Low-rank weight changes: their algebra, and files of them made, proved, applied and read.

Make a LoRA:

- `extract`: the difference of two checkpoints, decomposed layer by layer into a LoRA file.
- `plan`: how large a LoRA has to be, before one is made.
- `statistics`: what the model does with its weights, so that an extraction keeps the picture; `calibration` makes them.
- `merge`, `resize`: several LoRA files joined into one, and one given other ranks.
- `convert`: a LoRA file carried to another format without loss.

Prove and read it:

- `validate`: how well base and LoRA together give the tuned model back.
- `inspect`, `compare`: what is in a file, and whether two files hold the same change.
- `compatibility`: whether a file is for a model, and whether it is really on one.
- `effect`: how much the patches on a model change its weights, and what two LoRAs share.

Apply it:

- `apply`: on a live model, attached or merged, and taken off again.
- `checkpoint_merge`: merged into a checkpoint file.

What these are made of:

- `factors`, `adapters`: ΔW = s · up · down, and the changes that are more than that (LoHa, LoKr, DoRA, Tucker, diff).
- `decompose`, `ranks`, `budget`: factors of a matrix, and how many of them each layer gets.
- `families`: a file for each family of models. `layer_names`, `module_names`, `alignment`: what layers are called.
- `fingerprint`: of a base, in the header of a LoRA.
- `reader`, `writer`, `formats`: LoRA files of kohya, PEFT, ComfyUI and LBM.
"""
