"""What the exact base is made of: backbones, the rule by which they are adapted, the files, the proof."""
