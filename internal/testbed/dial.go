package testbed

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// Dial returns a connection of gRPC without TLS to an address or a URL. It is closed with the test.
func Dial(t testing.TB, address string, options ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(strings.TrimPrefix(address, "http://"), append([]grpc.DialOption{grpc.WithTransportCredentials(insecure.NewCredentials())}, options...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}
