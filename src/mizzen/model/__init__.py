"""Facts about a model, none about a run: what it is made of (`Sketch`), what repeats in it (`Blocks`), and what a rank
holds of one of its tensors (`Piece`, in `Box`es of global coordinates). Names are imported from their modules.
"""
