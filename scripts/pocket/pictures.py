"""Draw the picture of the pocket model's card: held-out scenes relit by base and tuned, beside the truth.

python scripts/pocket/pictures.py docs/images/pocket_scenes.png
"""

import sys
from pathlib import Path

from PIL import Image

from sigmascope.lbm.images import contact_sheet, save_image
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.model import load_lbm
from sigmascope.lbm.pocket import BASE_PATH, CONFIG_PATH, TUNED_PATH
from sigmascope.lbm.pocket.scenes import COOL, WARM, relighting_pair

SCENES = (0, 4, 5, 12)


def main() -> None:
    """Draw and save."""
    base, tuned = load_lbm(BASE_PATH, CONFIG_PATH), load_lbm(TUNED_PATH, CONFIG_PATH)
    shown = []
    for number in SCENES:
        source, warm = (Image.fromarray(pixels) for pixels in relighting_pair(number, WARM))
        cool = Image.fromarray(relighting_pair(number, COOL)[1])
        shown += [
            (f"scene {number}", source),
            ("base", translate_image(base, source, seed=0)),
            ("warm, truth", warm),
            ("tuned", translate_image(tuned, source, seed=0)),
            ("cool, truth", cool),
        ]
    save_image(contact_sheet(shown, columns=5), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
