package process

import "testing"

func TestASmallHeapMayGrowToTheFloorAndALargeOneByItsSize(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		live uint64
		want int
	}{
		"nothing yet":         {0, 1600},
		"nearly nothing":      {1 << 10, 1600},
		"a sixteenth":         {HeapFloor / 16, 1500},
		"a quarter":           {HeapFloor / 4, 300},
		"half":                {HeapFloor / 2, 100},
		"more than half":      {HeapFloor * 3 / 4, 100},
		"far above the floor": {HeapFloor * 100, 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := growth(test.live); got != test.want {
				t.Errorf("%d bytes may grow by %d %%, want %d", test.live, got, test.want)
			}
		})
	}
}
