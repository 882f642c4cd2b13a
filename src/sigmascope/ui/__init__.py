"""Pages in the browser: one server and one frame. Only the command line and the tests import them: they need the extra `ui`.

- `server`: takes the port, tells the address, and ends promptly.
- `app`: puts the parts together; a part is the pages of one subject, and a page is laid out in the frame.
- `security`: who may talk to it, what is refused, and how much one request may ask for.
- `runs_pages`, `live_pages`, `trend_page`, `lora_pages`, `doctor_page`: what `sigmascope ui` shows.
- `lbm_page`: the page of `sigmascope lbm serve`, a picture in, base and LoRA result side by side; `lbm_model`: the model behind it.
"""
