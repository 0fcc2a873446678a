package batch

import "container/heap"

// place is where an element is in a heap: 0 for nowhere, else its index + 1.
type place int

// indexed is a heap whose elements know their places, so that each can be
// moved or taken out.
type indexed[T any] struct{ inner[T] }

// inner implements heap.Interface.
type inner[T any] struct {
	elements []T
	before   func(a, b T) bool
	at       func(T) *place
}

func newIndexed[T any](before func(a, b T) bool, at func(T) *place) indexed[T] {
	return indexed[T]{inner[T]{before: before, at: at}}
}

// set puts x in, or moves it to where it belongs by now.
func (h *indexed[T]) set(x T) {
	if at := *h.at(x); at != 0 {
		heap.Fix(&h.inner, int(at)-1)
		return
	}
	heap.Push(&h.inner, x)
}

// remove takes x out, if it is in.
func (h *indexed[T]) remove(x T) {
	if at := *h.at(x); at != 0 {
		heap.Remove(&h.inner, int(at)-1)
	}
}

func (h *indexed[T]) first() (first T, ok bool) {
	if len(h.elements) == 0 {
		return first, false
	}
	return h.elements[0], true
}

func (in *inner[T]) Len() int           { return len(in.elements) }
func (in *inner[T]) Less(i, j int) bool { return in.before(in.elements[i], in.elements[j]) }

func (in *inner[T]) Swap(i, j int) {
	in.elements[i], in.elements[j] = in.elements[j], in.elements[i]
	*in.at(in.elements[i]) = place(i + 1)
	*in.at(in.elements[j]) = place(j + 1)
}

func (in *inner[T]) Push(x any) {
	element := x.(T)
	in.elements = append(in.elements, element)
	*in.at(element) = place(len(in.elements))
}

func (in *inner[T]) Pop() any {
	last := len(in.elements) - 1
	element := in.elements[last]
	var none T
	in.elements[last] = none
	in.elements = in.elements[:last]
	*in.at(element) = 0
	return element
}
