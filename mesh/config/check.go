package config

import (
	"cmp"
	"fmt"
	"net"
)

// ValidAddress checks an address to listen on.
func ValidAddress(addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err == nil && port != "" {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil || port == "" {
		return fmt.Errorf("%q is no address such as 127.0.0.1:8080, or :8080 for all of this machine's", addr)
	}
	return nil
}

// Address checks the address to listen on of the key; empty means that nobody listens.
func Address(key, addr string) error {
	if addr == "" {
		return nil
	}
	if err := ValidAddress(addr); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// NotNegative checks the number of the key.
func NotNegative[N cmp.Ordered](key string, n N) error {
	var zero N
	if n < zero {
		return fmt.Errorf("%s: %v is negative", key, n)
	}
	return nil
}
