"""The only door to transformers: stock models behind one forward over slots, trees and ragged rows."""
