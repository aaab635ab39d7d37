"""The transformers interface: stock models behind one forward over slots, trees and ragged rows."""
