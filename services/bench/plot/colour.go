package plot

import "fmt"

// series are colours that are told apart by everyone: those of Okabe and Ito, "Color
// Universal Design" (2008), without the yellow, which is too light for a line.
func series(i int) string {
	colours := []string{"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"}
	return colours[i%len(colours)]
}

// Colours of what is between the steps and around them.
const (
	hopsColour    = "#8c8c8c"
	outsideColour = "#cfcfcf"
)

// shade is a step's colour for queue, batch or run: the work is the darkest.
func shade(step, part int) string {
	hues := []int{205, 24, 162, 322, 45, 265, 0, 90}
	lightness := []int{80, 65, 42}
	return fmt.Sprintf("hsl(%d,60%%,%d%%)", hues[step%len(hues)], lightness[part%len(lightness)])
}
