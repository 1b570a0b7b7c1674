"""Transcripts that coding agents and chats keep on this disk, as turns. A module for each client; opens files only."""
