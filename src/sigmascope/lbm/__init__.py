"""Latent Bridge Matching (arXiv 2503.07535): picture-to-picture models that need one to four steps.

To use a model:

- `config`: the YAML that describes a model, and where it is found.
- `model`: denoiser and VAE, built or loaded.
- `infer`: translate a picture.
- `calibration`: sum up what the layers do meanwhile.
- `bridge`: the equations.
- `image_validation`: prove a LoRA on pictures.
- `images`, `devices`: pictures in and out; device, dtype and memory that runs out.

To make one:

- `base`: what training starts from, made of a text-to-image backbone.
- `make_shards`: write pairs of pictures to WebDataset shards.
- `data`: decode them and give them in batches; `shards` reads the files.
- `training`: train a LoRA or every weight.
- `pocket`: a trained model that ships with the package, and the scenes it was trained on.
"""
