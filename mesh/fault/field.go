package fault

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxKey bounds what a path repeats of a caller's own key, in bytes.
const maxKey = 40

// Member returns the path of a member of the object at a path: "inputs.order" and
// "price" are "inputs.order.price". A key that is no plain word is in brackets and
// quotes, and a long one is cut.
func Member(path, key string) string {
	if len(key) > maxKey {
		key = strings.ToValidUTF8(key[:maxKey], "") + "..."
	}
	if !plainKey(key) {
		return fmt.Sprintf("%s[%s]", path, strconv.Quote(key))
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

// Element returns the path of an element of the list at a path: "inputs.items[3]".
func Element(path string, i int) string { return path + "[" + strconv.Itoa(i) + "]" }

func plainKey(key string) bool {
	if key == "" || !utf8.ValidString(key) {
		return false
	}
	return strings.Trim(key, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.$") == ""
}
