// Package insecure is newer gRPC's, for what new_client.go makes of it.
package insecure

import "google.golang.org/grpc/credentials"

type none struct {
	credentials.TransportCredentials
}

func (none) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "insecure"}
}

// NewCredentials stands for no encryption.
func NewCredentials() credentials.TransportCredentials { return none{} }
