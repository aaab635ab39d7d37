"""Models behind one forward over slots, trees and ragged rows; the only package that imports transformers."""
