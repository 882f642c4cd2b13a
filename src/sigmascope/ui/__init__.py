"""Pages in the browser. Only the command line and the tests import them: they need the extra `ui`.

There is one page, that of `sigmascope lbm serve`: a picture in, base and LoRA result side by side, with what each
took.

- `app`: the server, the addresses of the page, and the line in which requests wait.
- `security`: who may talk to it, what is refused, and how much one request may ask for.
- `lbm_model`: the model behind it, and what clients ask of it.
"""
