package config

import (
	"cmp"
	"fmt"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"strings"
)

// Exposure is how a port may be reached. One rule holds for every port: other machines may
// reach it only if its callers authenticate, or if the operator says that it is insecure.
type Exposure struct {
	Listen string
	// IsAuthenticated is true where callers authenticate.
	IsAuthenticated bool
	// Insecure and AnyHost are what the operator says: other machines may call without
	// authentication; callers may name a port of this machine by any host name.
	Insecure, AnyHost bool
}

// Check returns the error of an address that the rule rejects, with the key of the address. The
// advice says how callers can authenticate, such as "name a file with a token in token_file, ",
// and is empty where they cannot.
func (e Exposure) Check(key, advice string) error {
	if e.Insecure || !e.isOpen() {
		return nil
	}
	return fmt.Errorf("%s: other machines can reach %s; %slisten on 127.0.0.1, or set insecure: true", key, e.Listen, advice)
}

// Warn logs a port that other machines reach without authentication, with the key of its
// address.
func (e Exposure) Warn(log *slog.Logger, key string) {
	if e.isOpen() {
		log.Warn("other machines can call this port without authentication", "port", key, "address", e.Listen)
	}
}

// isOpen reports whether other machines reach the port without authentication. A name other
// than localhost may mean anything.
func (e Exposure) isOpen() bool {
	if e.Listen == "" || e.IsAuthenticated {
		return false
	}
	host, _, err := net.SplitHostPort(e.Listen)
	return err != nil || !IsLoopback(host)
}

// IsPrivate reports whether the port is for this machine because nobody authenticates: its
// callers have to name it by a loopback address, so that no page reaches it by a name of its
// own that resolves to 127.0.0.1. Insecure, which is for other ports, does not change that.
func (e Exposure) IsPrivate() bool { return !e.IsAuthenticated && !e.AnyHost && !e.isOpen() }

// IsLoopback reports whether a host, which may have a port, is this machine by its name or
// address.
func IsLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(strings.Trim(host, "[]"))
	return ip != nil && ip.IsLoopback()
}

// Advertised returns the address by which others reach a listener's address: if that is all
// addresses of this machine, its host is replaced by the given one, or, if there is none, by
// the machine's first address that is not loopback.
func Advertised(listener, host string) string {
	if !IsUnspecified(listener) {
		return listener
	}
	_, port, _ := net.SplitHostPort(listener)
	return net.JoinHostPort(cmp.Or(host, ownAddress()), port)
}

// IsUnspecified reports whether a listener's address is all addresses of this machine.
func IsUnspecified(listener string) bool {
	host, _, err := net.SplitHostPort(listener)
	return err == nil && (host == "" || net.ParseIP(host).IsUnspecified())
}

// ownAddress returns an address of this machine for others; IPv4 goes before IPv6.
func ownAddress() string {
	addrs, _ := net.InterfaceAddrs() // without them only this machine can call
	own := "127.0.0.1"
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		switch {
		case !ok || !n.IP.IsGlobalUnicast():
		case n.IP.To4() != nil:
			return n.IP.String()
		case own == "127.0.0.1":
			own = n.IP.String()
		}
	}
	return own
}

// secretKeys end the keys of files that nobody else should read.
var secretKeys = []string{"token_file", "key_file", "credentials_file", "headers_file", "secret_files"}

// SecretFiles returns the files of tokens, keys and other secrets that a section names, by the keys
// of its fields.
func SecretFiles(section any) (out []string) {
	var walk func(v reflect.Value)
	walk = func(v reflect.Value) {
		switch v.Kind() {
		case reflect.Pointer, reflect.Interface:
			if !v.IsNil() {
				walk(v.Elem())
			}
		case reflect.Struct:
			fields := map[string]field{}
			addFields(fields, v.Type(), nil)
			for key, f := range fields {
				one, isSecret := v.FieldByIndex(f.index), slices.ContainsFunc(secretKeys, func(end string) bool { return strings.HasSuffix(key, end) })
				switch path, isText := one.Interface().(string); {
				case !isSecret:
					walk(one)
				case !isText:
					out = append(out, one.Interface().([]string)...)
				case path != "":
					out = append(out, path)
				}
			}
		case reflect.Map:
			for _, key := range v.MapKeys() {
				walk(v.MapIndex(key))
			}
		case reflect.Slice:
			for i := range v.Len() {
				walk(v.Index(i))
			}
		}
	}
	walk(reflect.ValueOf(section))
	slices.Sort(out)
	return slices.Compact(out)
}
