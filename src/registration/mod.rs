//! The registration actor: keeps every resource registered with the kubelet.
