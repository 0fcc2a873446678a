// Package topk names the best of a classifier's scores.
//
//	label:
//	  runner:
//	    top_k:
//	      k: 3
//	      labels: [cat, dog, bird]   # or labels_file: labels.txt
//	      softmax: true              # where the scores are logits
//
// The keys are those of Settings. The runner takes an FP32 tensor named scores
// of shape [rows, C], where C is the number of labels, and gives for every row
// its k best, best first: labels, BYTES [rows, k], and scores, FP32 [rows, k].
// Of equal scores the one with the lower index comes first.
//
// An item with a score that is NaN, or under softmax with a row that has no
// finite maximum, is refused as INVALID_INPUT; its neighbours are not.
//
// The labels file is read by New and has one label a line, in the order of the
// scores; it may end with a line break, and a label may be empty.
package topk
