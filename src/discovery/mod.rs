//! The discovery actor: watches the host and says which devices there are.
