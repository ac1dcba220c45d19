//! What is hot: profiles, recording, trace building, speculation policy
