package main

import (
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// describe gives the status in a line, and one for each detail that a program could act on.
func describe(err error) string {
	refusal := status.Convert(err)
	lines := []string{fmt.Sprintf("%s: %s", code.Code(refusal.Code()), refusal.Message())}
	for _, detail := range refusal.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			lines = append(lines, "  reason: "+detail.Reason)
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				lines = append(lines, "  field: "+violation.Field)
			}
		case *errdetails.RetryInfo:
			lines = append(lines, fmt.Sprintf("  try again in %v", detail.RetryDelay.AsDuration()))
		}
	}
	return strings.Join(lines, "\n")
}
