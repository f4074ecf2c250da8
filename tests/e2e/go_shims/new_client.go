package grpc

// NewClient is what newer gRPC calls Dial. Credentials named "insecure" were an option of their own.
func NewClient(target string, options ...DialOption) (*ClientConn, error) {
	return Dial(target, append(options, newFuncDialOption(func(o *dialOptions) {
		if o.copts.TransportCredentials.Info().SecurityProtocol == "insecure" {
			o.copts.TransportCredentials = nil
			o.insecure = true
		}
	}))...)
}
